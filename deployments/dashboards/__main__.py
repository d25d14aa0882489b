from deployments.dashboards import files

for path, text in files().items():
    path.write_text(text)
